"""With what requests to s3 and gs are signed: the default chain of credentials, and nothing where it ends empty.

obstore knows keys, web identities and roles of containers from the environment.  Profiles and the question whether this
machine has a role, which must not take long where there is no metadata service, are answered here.
"""

from __future__ import annotations

import configparser
import functools
import http.client
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vesuvius.errors import DataError

# A metadata service is one hop away; where there is none, as on a laptop, every process waits for this.
_PROBE_S = 0.5
_REREAD = timedelta(minutes=5)  # tools that renew a profile's keys write them into the same file
_NEEDS_BOTO3 = {"role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file"}


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
    if name := _first_set("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        return Signing(f"signed with {name} of the environment"), ""
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    if found := _profile(profile):
        return found, ""
    # Of AWS_CONTAINER_CREDENTIALS_FULL_URI obstore knows the kind with a token in a file.
    if name := _first_set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        return Signing(f"signed with {name}"), ""
    set_by = _first_set("AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_METADATA_ENDPOINT")
    endpoint = os.environ[set_by] if set_by else "http://169.254.169.254"
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and _has_instance_role(endpoint):
        return Signing("signed with the instance's role", {"metadata_endpoint": endpoint}), ""
    where = " and ".join(map(str, _profile_files()))
    return None, f"no AWS_* in the environment, no profile {profile} in {where}, no role of container or instance"


def _google() -> tuple[Signing | None, str]:
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if name := _first_set(*names, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"):
        return Signing(f"signed with {name} of the environment"), ""
    login = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    login /= "application_default_credentials.json"
    if login.exists():
        return Signing(f"signed with {login}", {"application_credentials": str(login)}), ""
    if os.environ.get("NO_GCE_CHECK", "").lower() != "true" and _has_service_account():
        return Signing("signed with the machine's service account"), ""
    return None, f"no GOOGLE_* in the environment, no {login}, no service account of the machine"


def _first_set(*names: str) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)


# ---- profiles of the AWS command


def _profile_files() -> tuple[Path, Path]:
    """The files with settings and with keys."""
    return (
        Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
    )


def _read_profile(name: str) -> dict[str, str]:
    """The settings of a profile, of both files; empty where there is none."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(_profile_files())
    except (configparser.Error, UnicodeError) as error:
        # No words of its own: they quote the lines, which may be keys.
        files = " and ".join(map(str, _profile_files()))
        raise DataError(
            f"Cannot read the AWS profile {name}: {type(error).__name__} in {files}; correct them"
        ) from None
    return {key: text for part in (f"profile {name}", name) if part in parser for key, text in parser[part].items()}


def _profile(name: str) -> Signing | None:
    """Signing with a profile's keys; None where there is no profile, or one of settings only."""
    settings = _read_profile(name)
    if not settings and name != "default":
        raise DataError(
            f"AWS_PROFILE {name} is in none of {' and '.join(map(str, _profile_files()))}; correct or unset it, or set "
            "data.store.anonymous=true"
        )
    if _NEEDS_BOTO3 & settings.keys() and ("role_arn" in settings or "aws_access_key_id" not in settings):
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise DataError(
                f"The AWS profile {name}, which holds no keys but a role, a login or a process, needs boto3; install "
                "it, or export keys: eval $(aws configure export-credentials --format env)"
            ) from None
        options: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(ttl=_REREAD)}
    elif "aws_access_key_id" in settings:
        options = {"credential_provider": functools.partial(_keys_of_profile, name)}
    else:
        return None
    if "region" in settings and not os.environ.get("AWS_REGION"):
        options["region"] = settings["region"]
    return Signing(f"signed with the AWS profile {name}", options)


def _keys_of_profile(name: str) -> dict[str, Any]:
    settings = _read_profile(name)
    return {
        "access_key_id": settings["aws_access_key_id"],
        "secret_access_key": settings["aws_secret_access_key"],
        "token": settings.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + _REREAD,
    }


# ---- roles of the machine


@functools.cache
def _has_instance_role(endpoint: str) -> bool:
    token = _ask(endpoint, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    path = "/latest/meta-data/iam/security-credentials/"
    return token is not None and bool(_ask(endpoint, "GET", path, {"X-aws-ec2-metadata-token": token}))


@functools.cache
def _has_service_account() -> bool:
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    path = "/computeMetadata/v1/instance/service-accounts/default/email"
    return bool(_ask(f"http://{host}", "GET", path, {"Metadata-Flavor": "Google"}))


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
