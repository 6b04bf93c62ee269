"""The forms in which a value waits for backward, a file each. `crossings.needs` says who is offered which."""
