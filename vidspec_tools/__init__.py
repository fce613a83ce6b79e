"""What measures, plans and writes pages. A clone has it and the wheel does not: it may import the package only."""
