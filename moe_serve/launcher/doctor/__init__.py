"""`moe-serve doctor`, run by the launcher of the ranks: examines every rank and pair before anything is loaded."""

from moe_serve.launcher.doctor.run import run_doctor

__all__ = ["run_doctor"]
