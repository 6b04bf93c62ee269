"""The forms in which a value waits for backward, a file each. `analysis.peak.needs` says who is offered which."""
