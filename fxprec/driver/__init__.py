"""Turn Dynamo's graph into compiled code and run it: capture, passes, lowering, compilation, and each step."""
