"""With what requests to s3 and gs are signed: the default chain of credentials, and nothing where it ends empty.

obstore knows keys, web identities and roles of containers from the environment.  Profiles and the question whether this
machine has a role, which must not take long where there is no metadata service, are answered here.
"""

from __future__ import annotations

import configparser
import functools
import http.client
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vesuvius.errors import DataError, one_line

# A metadata service is one hop away; where there is none, as on a laptop, every process waits for this.
_PROBE_S = 0.5
_REREAD = timedelta(minutes=5)  # tools that renew a profile's keys write them into the same file
_MAKERS = Path("/sys/class/dmi/id/sys_vendor")
_WEB_IDENTITY = ("AWS_WEB_IDENTITY_TOKEN_FILE",)
_TOKEN_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_GOOGLE = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_BEARER_TOKEN",
)


@dataclass(frozen=True)
class Signing:
    """How the requests of a store are signed.

    Attributes:
        words: with what, or what was looked for in vain, for messages.
        options: for obstore's store.
    """

    words: str
    options: dict[str, Any] = field(default_factory=dict)


def find_signing(scheme: str, anonymous: bool | None) -> Signing:
    """The first credentials of the default chain; without any, requests are not signed.

    Reads the environment and the files of the AWS and gcloud commands, and asks the machine's metadata service, if it
    has one, for at most a second.

    Args:
        scheme: s3 or gs.
        anonymous: `data.store.anonymous`: True = do not sign; False = sign, if need be with what the machine's metadata
            service says later.

    Raises:
        DataError: a profile is set that is not there, or that needs boto3.
    """
    if anonymous:
        return Signing("not signed, as data.store.anonymous=true says", {"skip_signature": True})
    found, tried = _aws() if scheme == "s3" else _google()
    if found is None and anonymous is False:
        return Signing(f"signed with the machine's credentials, as there is {tried}")
    return found or Signing(f"not signed: there is {tried}", {"skip_signature": True})


def _aws() -> tuple[Signing | None, str]:
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return Signing("signed with AWS_ACCESS_KEY_ID of the environment"), ""
    if name := _first_set(_WEB_IDENTITY):
        return Signing(f"signed with {name}"), ""
    if profile := _profile():
        return profile, ""
    if name := _first_set(_CONTAINER):
        # What obstore does not know itself: it would ask for an instance's role.
        knows = name == _CONTAINER[0] or os.environ.get(_TOKEN_FILE)
        return Signing(f"signed with {name}", {} if knows else {"credential_provider": _keys_of_botocore(name)}), ""
    endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or os.environ.get("AWS_METADATA_ENDPOINT")
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if not disabled and _has_instance_role(endpoint):
        return Signing("signed with the instance's role", {"metadata_endpoint": endpoint} if endpoint else {}), ""
    where = " and ".join(map(str, _profile_files()))
    missing = f"no AWS_* in the environment, no profile {_profile_name()} in {where}, no role of container or instance"
    return None, missing


def _google() -> tuple[Signing | None, str]:
    if name := _first_set(_GOOGLE):
        return Signing(f"signed with {name} of the environment"), ""
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config/gcloud"
    login = Path(folder) / "application_default_credentials.json"
    if login.exists():
        return Signing(f"signed with {login}", {"application_credentials": str(login)}), ""
    if os.environ.get("NO_GCE_CHECK", "").lower() != "true" and _has_service_account():
        return Signing("signed with the machine's service account"), ""
    return None, f"no GOOGLE_* in the environment, no {login}, no service account of the machine"


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)


# ---- profiles of the AWS command


def _profile_name() -> str:
    return os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"


def _profile_files() -> tuple[Path, Path]:
    """The files with keys and with settings."""
    return (
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
        Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
    )


def _read_profile() -> dict[str, str]:
    """The settings of the profile, of both files; empty where there is none."""
    name, found = _profile_name(), dict[str, str]()
    credentials, config = _profile_files()
    for file, section in ((config, name if name == "default" else f"profile {name}"), (credentials, name)):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(file)
        except (configparser.Error, UnicodeError) as error:
            raise DataError(f"Cannot read {file}: {one_line(error)}; correct it, or set AWS_ACCESS_KEY_ID") from error
        found |= dict(parser[section]) if parser.has_section(section) else {}
    return found


def _profile() -> Signing | None:
    """Signing with the profile's keys; None where there is no profile, or one of settings only."""
    settings, name = _read_profile(), _profile_name()
    if not settings and name != "default":
        raise DataError(
            f"AWS_PROFILE {name} is in none of {' and '.join(map(str, _profile_files()))}; correct or unset it, or set "
            "data.store.anonymous=true"
        )
    region = {"region": settings["region"]} if "region" in settings and not os.environ.get("AWS_REGION") else {}
    words = f"signed with the AWS profile {name}"
    if "aws_access_key_id" in settings and "role_arn" not in settings:
        return Signing(words, {"credential_provider": _keys_of_profile, **region})
    if not {"role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file"} & set(
        settings
    ):
        return None
    provider = _keys_of_botocore(f"The AWS profile {name}, which holds no keys but a role, a login or a process,")
    return Signing(words, {"credential_provider": provider, **region})


def _keys_of_profile() -> dict[str, Any]:
    settings = _read_profile()
    return {
        "access_key_id": settings["aws_access_key_id"],
        "secret_access_key": settings["aws_secret_access_key"],
        "token": settings.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + _REREAD,
    }


def _keys_of_botocore(what: str) -> Callable[[], dict[str, Any]]:
    """What obstore calls for keys, from the credentials that botocore finds and renews.

    Args:
        what: needs it, for messages.
    """
    try:
        from botocore.session import Session
    except ImportError:
        raise DataError(
            f"{what} needs boto3; install it, or export keys: eval $(aws configure export-credentials --format env)"
        ) from None
    credentials = Session().get_credentials()

    def keys() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _REREAD,
        }

    return keys


# ---- roles of the machine


@functools.cache
def _has_instance_role(endpoint: str | None) -> bool:
    if endpoint is None and not _may_be_made_by("Amazon"):
        return False
    endpoint = endpoint or "http://169.254.169.254"
    token = _ask(endpoint, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if token is None:
        return False
    return bool(
        _ask(endpoint, "GET", "/latest/meta-data/iam/security-credentials/", {"X-aws-ec2-metadata-token": token})
    )


@functools.cache
def _has_service_account() -> bool:
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_ROOT")
    if host is None and not _may_be_made_by("Google"):
        return False
    path = "/computeMetadata/v1/instance/service-accounts/default/email"
    return bool(_ask(f"http://{host or '169.254.169.254'}", "GET", path, {"Metadata-Flavor": "Google"}))


def _may_be_made_by(maker: str) -> bool:
    """Whether this machine may be one of a cloud; False only where it says that it is another one's."""
    try:
        return maker in _MAKERS.read_text()
    except OSError:
        return True


def _ask(endpoint: str, method: str, path: str, headers: dict[str, str]) -> str | None:
    """The answer of a metadata service, past all proxies; None where it is not 200, or does not come at once."""
    url = urlsplit(endpoint)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=_PROBE_S)
    try:
        connection.request(method, url.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        return answer.read(4096).decode("latin-1") if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
