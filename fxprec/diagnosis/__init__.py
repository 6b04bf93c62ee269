"""The doctor: what each stored tensor of a training step costs in each format, predicted, checked, and advised on."""
