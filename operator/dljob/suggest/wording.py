"""Write counts with words that agree with them."""


def counted(count: int, one: str, many: str) -> str:
    """Return a count with the words for one or for many, such as '1 row is' or '2,000 rows are'."""
    return f"{count:,} {one if count == 1 else many}"


def rows_of(count: int) -> str:
    """Return a number of rows, such as '1 row'."""
    return counted(count, "row", "rows")
