"""What drafts would gain: shapes of models, cards, rooflines, acceptance, speed, and a plan made of them; plain Python.

Everything here is modelled, or computed from figures that a caller has measured; nothing loads a model or a device.
"""
