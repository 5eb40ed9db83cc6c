"""Errors that a user may cause, and the near-miss hint that each of them carries.

Every command line turns a `UserError` into one line on stderr and exit status 2.
Anything else is a defect of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
  """A mistake in what the user gave: one line that names path, value, expectation and near miss."""


class ConfigError(UserError):
  """A configuration key, value or combination that cannot be used."""


class CheckpointError(UserError):
  """A checkpoint that is incomplete, damaged, or of another architecture."""


class InputError(UserError):
  """A prompt, token id or sampling setting that cannot be served."""


class UnsupportedError(UserError, NotImplementedError):
  """An implementation, asked for by name, that cannot serve this call; `auto` would choose another."""


class TrainingError(UserError):
  """A training run that cannot go on: its loss or gradients are no numbers."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns `", did you mean 'x'?"` for the closest known name, or an empty string."""
  close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
  return f", did you mean '{close[0]}'?" if close else ""
