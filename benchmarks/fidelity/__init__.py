"""How far a training step under fxprec is from float32, on architectures nobody here wrote."""
