"""Options and recipes: `Config` has what the user set, `Settings` what is in force; every value is checked."""

from fxprec.config.config import ALLOWED, Config, Policy, policy_name
from fxprec.config.settings import Settings

__all__ = ["ALLOWED", "Config", "Policy", "Settings", "policy_name"]
