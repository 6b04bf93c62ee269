"""What the user asked for: options, recipes, and how each is checked."""

from fxprec.config.config import ALLOWED, DEFAULT_LOW_RATIO, Config, Policy, policy_name

__all__ = ["ALLOWED", "DEFAULT_LOW_RATIO", "Config", "Policy", "policy_name"]
