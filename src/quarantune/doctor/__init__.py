"""Looks at this machine for tuning: what it gives, and what is in the way, each finding with its remedy."""

from quarantune.doctor.check import Check, Status, failed
from quarantune.doctor.run import run

__all__ = ["Check", "Status", "failed", "run"]
