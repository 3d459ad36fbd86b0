"""The width of the messages in which rows are sent with their routing."""


def message_columns(columns: int) -> int:
    """Round the columns of a message up to the multiple of 16 that is sent."""
    return -(-columns // 16) * 16
