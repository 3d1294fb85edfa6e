"""One model, of which each device trains as much as it affords."""
