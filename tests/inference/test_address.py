"""Which addresses only this machine reaches."""

import pytest

from MaxText.inference.address import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone(host):
  assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "fe80::1", "no.such.host.invalid", "a" * 64])
def test_others_too(host):
  assert not is_loopback(host)
