"""Public suites of tests that nobody here wrote, run against fxprec."""
