"""Where public arrays and checkpoints stand, beside the repository or nowhere, and the bundled model."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
OPS = SHARED / "fixtures" / "ops"
ORACLE = SHARED / "fixtures" / "k3-oracle"
TINY = Path(__file__).resolve().parents[1] / "MaxText" / "assets" / "kimi-k3-tiny"
