"""What proves this repository; never shipped, and the package imports none of it."""
