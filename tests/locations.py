"""Where the public operator arrays and the oracle checkpoint stand: beside the repository, or nowhere."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
OPS = SHARED / "fixtures" / "ops"
ORACLE = SHARED / "fixtures" / "k3-oracle"
