"""What is counted and recorded, and how it reaches /metrics and responses."""
