"""The doctor: predicts and checks what each stored tensor of a training step costs in each format, and advises."""
