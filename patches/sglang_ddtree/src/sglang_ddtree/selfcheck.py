"""placeholder"""


def run(worker): ...
