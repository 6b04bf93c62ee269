"""What the user asked for and what is in force: options, recipes, and how each is checked."""

from fxprec.config.config import ALLOWED, DEFAULT_LOW_RATIO, Config, Policy, policy_name
from fxprec.config.settings import Settings

__all__ = ["ALLOWED", "DEFAULT_LOW_RATIO", "Config", "Policy", "Settings", "policy_name"]
