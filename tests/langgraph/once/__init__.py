"""Once means once: every fault on every saver and host, as data.

``faults`` says what goes wrong, ``hosts`` where, ``ledgers`` what is taken away or slowed down,
``lives`` holds the processes that are killed, ``table`` prints what was counted.
"""
