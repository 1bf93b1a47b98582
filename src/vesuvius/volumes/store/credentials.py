"""With what requests to s3 and gs are signed: the default chain of credentials, and nothing where it ends empty.

obstore knows keys and web identities from the environment; boto3 knows profiles and the roles of containers and of
machines.
"""

from __future__ import annotations

import functools
import http.client
import os
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from vesuvius.errors import DataError, one_line

_PROBE_S = 0.5  # a machine that is no Google one waits for so long, once per process
_REREAD = timedelta(minutes=5)  # tools that renew a profile's keys write them into the same file
_UNSIGNED = {"skip_signature": True}


class Signing(NamedTuple):
    """How the requests of a store are signed."""

    words: str  # with what, or what was looked for in vain, for messages
    options: dict[str, Any]  # for obstore's store


def find_signing(scheme: str, anonymous: bool | None) -> Signing:
    """The first credentials of the default chain; without any, requests are not signed.

    Reads the environment and the files of the AWS and gcloud commands; boto3 asks the metadata service of the machine.

    Args:
        scheme: s3 or gs.
        anonymous: `data.store.anonymous`: True = do not sign; False = sign, if need be with what the machine's metadata
            service says later.

    Raises:
        DataError: a profile is set that is not there, or its credentials cannot be read.
    """
    if anonymous:
        return Signing("not signed, as data.store.anonymous=true says", _UNSIGNED)
    found = _aws() if scheme == "s3" else _google()
    if isinstance(found, Signing):
        return found
    if anonymous is False:
        return Signing(f"signed with the machine's credentials, as there is {found}", {})
    return Signing(f"not signed: there is {found}", _UNSIGNED)


def _aws() -> Signing | str:
    """What was looked for, where nothing is found; so `_google`."""
    if name := _first_set("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        return Signing(f"signed with {name} of the environment", {})
    from botocore.exceptions import BotoCoreError  # takes a third of a second

    try:
        return _by_boto3() or "no AWS_* in the environment, and boto3 finds no profile and no role"
    except (BotoCoreError, OSError, ValueError) as error:  # the latter of a `credential_process`
        raise DataError(
            f"Cannot read the credentials of AWS: {one_line(error)}; correct AWS_PROFILE or the files of the profile, "
            "export keys, or set data.store.anonymous=true"
        ) from None


@functools.cache
def _by_boto3() -> Signing | None:
    """Signing as boto3 says, which is asked once: it waits for the metadata service of a machine that has none."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    if (session := boto3.Session()).get_credentials() is None:
        return None
    found = Boto3CredentialProvider(session, ttl=_REREAD)
    kind, region = found.credentials.method, found.config.get("region")
    in_file = kind in ("shared-credentials-file", "config-file")  # read once by a session of boto3
    provider = (lambda: Boto3CredentialProvider(ttl=_REREAD)()) if in_file else found
    own_region = {"region": region} if region and not os.environ.get("AWS_REGION") else {}
    return Signing(f"signed with the {kind} that boto3 finds", {"credential_provider": provider} | own_region)


def _google() -> Signing | str:
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if name := _first_set(*names, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"):
        return Signing(f"signed with {name} of the environment", {})
    login = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    login /= "application_default_credentials.json"
    if login.exists():
        return Signing(f"signed with {login}", {"application_credentials": str(login)})
    if os.environ.get("NO_GCE_CHECK", "").lower() != "true" and _has_service_account():
        return Signing("signed with the machine's service account", {})
    return f"no GOOGLE_* in the environment, no {login}, no service account of the machine"


@functools.cache
def _has_service_account() -> bool:
    """Whether the metadata service of a Google machine, one hop away and past all proxies, knows of one."""
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/email"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(
            urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), timeout=_PROBE_S
        ) as answer:
            return bool(answer.read(4096))
    except (OSError, http.client.HTTPException):
        return False


def _first_set(*names: str) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)
