"""Choose, for each value that backward needs, the form it is saved in, or that it is recomputed.

`needs` lists the values, what backward requires of each, and the forms it may have. `problem` states the choice as a
mixed-integer problem, `choice` solves it, and `budget`, `share` and `given` put the question: under ``peak_budget``,
under torch's ``activation_memory_budget``, and as a given plan says. `rewrite` edits the graph accordingly.
"""
