"""The errors that users see; every one is a single clear line, raised before weights load where possible."""


class VidSpecError(ValueError):
    """A wrong knob, an incompatible pair or an unsupported engine. The message is one line that says what to do."""
