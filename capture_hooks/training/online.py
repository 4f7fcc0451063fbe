"""(being written)"""


class LiveCapture:
    pass
