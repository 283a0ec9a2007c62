"""What can go wrong when something is fetched by its Hub name."""

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)


def reason(error: BaseException) -> str:
    """The first line of an error of the Hub's, which are long."""
    lines = str(error).strip().splitlines()
    return f"it is no folder here, and the Hub did not give it: {lines[0] if lines else error!r}"
