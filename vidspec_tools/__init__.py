"""What measures, plans and writes pages. A clone has it and the wheel does not: it may import the package only.

What a user got wrong, and an engine that stopped, is a VidSpecError everywhere here: one line that names it.
"""
