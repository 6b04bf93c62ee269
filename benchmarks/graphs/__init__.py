"""Random training programs: generated, compiled, compared with float64 and shrunk."""
