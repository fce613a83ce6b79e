"""Changes of arguments that a wrapper must refuse, by the argument's name."""


def changes(**by_name):
    """Return pairs of a name and one of its changes, for `parametrize`."""
    return [(name, change) for name, several in by_name.items() for change in several]


def double(tensor):
    return tensor.double()


def half(tensor):
    return tensor.half()


def long(tensor):
    return tensor.long()


def int32(tensor):
    return tensor.int()


def shorter(tensor):
    return tensor[:-1]


def first(tensor):
    return tensor[:1]


def first_two(tensor):
    return tensor[:2]


def transposed(tensor):
    """The same values, without unit stride in a row."""
    return tensor.T.contiguous().T


def nothing(_):
    return None
