"""Choose, for each value that backward needs, the form it is saved in, or that it is recomputed.

`needs` lists the values, what backward requires of each, and the forms it may have. `problem` states the choice as a
mixed-integer problem, and `choice` solves it. Three modules put the question: `peak_budget` under a ``peak_budget``,
`saved_share` under torch's ``activation_memory_budget``, and `given_plan` as a given plan says. `rewrite` edits the
graph accordingly.
"""
