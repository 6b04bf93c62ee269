"""What the user asked for and what is in force: options, recipes, and how each is checked."""

from fxprec.config.config import ALLOWED, Config, Policy, policy_name
from fxprec.config.settings import Settings

__all__ = ["ALLOWED", "Config", "Policy", "Settings", "policy_name"]
