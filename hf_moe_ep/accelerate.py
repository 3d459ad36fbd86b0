"""stub while building"""
def install() -> None:
    pass
