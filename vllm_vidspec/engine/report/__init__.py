"""What is counted, and who is told."""
