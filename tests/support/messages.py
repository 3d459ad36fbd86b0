"""The width of the messages in which rows are sent with their routing."""


def message_columns(columns: int) -> int:
    """Return the number of columns that a message of so many columns has on the wire."""
    return -(-columns // 16) * 16
