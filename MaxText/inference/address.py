"""Who can reach the address that a server listens on."""

import ipaddress
import socket
import sys


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches `host`, a name or an address; one that nobody knows is not local."""
  try:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
  except (OSError, UnicodeError):
    return False


def warn_of_strangers(host: str, advice: str) -> None:
  """Says on stderr that a server without a key answers whoever reaches it; nothing for this machine alone.

  Args:
    host: name or address that it listens on.
    advice: what the user can do about it.
  """
  if not is_loopback(host):
    print(f"WARNING: host={host}: anybody who reaches it may ask; {advice}", file=sys.stderr, flush=True)
