"""Programs that show s3cache at work."""
