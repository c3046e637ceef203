"""The public faces: the decorator, the programmatic tuner and contextual tuning."""
