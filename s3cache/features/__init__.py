"""The features, in the order in which they are called; ``s3cache/seam.py`` explains them."""

FEATURES = (
    "startup",
    "recall",
    "ports",
    "job_profile",
    "target",
    "device",
    "ranks",
    "single_flight",
)
