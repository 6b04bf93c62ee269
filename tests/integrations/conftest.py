"""Process groups take seconds to start: their results are there once for all workers of a test run."""

from tests.aps.conftest import once as once
