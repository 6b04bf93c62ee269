"""From Dynamo's graph to compiled code: capture, passes, lowering, compilation, and what runs each step."""
