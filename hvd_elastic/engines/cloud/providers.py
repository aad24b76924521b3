"""The table of the providers of machines."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_elastic.engines.cloud.provider import Provider
from hvd_elastic.engines.cloud.records import Definition
from hvd_elastic.errors import UsageError

PROVIDERS = ("aws", "command")


def provider_named(name: str, settings: Mapping[str, str]) -> Provider:
    """Return a provider.

    Raises:
        UsageError: there is none of that name, or its settings are not valid.
        CloudError: it cannot be used, such as without credentials.
    """
    if name == "command":
        from hvd_elastic.engines.cloud.command import CommandProvider

        return CommandProvider(settings)
    if name == "aws":
        from hvd_elastic.engines.cloud.aws import AwsProvider

        return AwsProvider(settings)
    raise UsageError(f"--provider {name!r} is not known; valid: {', '.join(PROVIDERS)}")


def provider_of(definition: Definition) -> Provider:
    """Return the provider of a cloud; errors as of :func:`provider_named`."""
    return provider_named(definition.provider, definition.settings)
