"""Finds the credentials that sign requests, by each store's default chain; without any, requests are not signed.

obstore handles keys in the environment and the service accounts of Google and Azure machines; boto3 handles profiles,
web identities, and the roles of containers and machines; without boto3, obstore handles all but the profiles.
"""

import base64
import functools
import http.client
import netrc
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from vesuvius.errors import DataError, needs_extra, one_line, warn_once
from vesuvius.runlog.redact import hide

_HEADERS = "VESUVIUS_HTTP_HEADERS"
_PROBE_S = 0.5  # lost once per process and service on a machine without a metadata service
_ANSWER_S = 5.0  # a metadata service may take so long to make a token
_METADATA_HOST = "169.254.169.254"
_REREAD = timedelta(minutes=5)  # tools renew the keys of a profile in place
_AWS_FILES = (("SHARED_CREDENTIALS", "credentials"), ("CONFIG", "config"))
_AWS_KEYS = re.compile(r"^\s*(aws_access_key_id|sso_\w+|role_arn|credential_process|login_session)\s*=", re.MULTILINE)
_AWS_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_UNSIGNED = {"skip_signature": True}


class Signing(NamedTuple):
    words: str  # the credentials, or those that were looked for; for messages
    options: dict[str, Any]  # for obstore's store
    headers: Mapping[str, str] = {}  # of each request; dropped on a redirect to another host or port


def find_signing(address: str, anonymous: bool | None) -> Signing:
    """The first credentials in the default chain; without any, requests are not signed.

    Reads the environment, the files of each cloud's command-line tools and netrc; asks the machine's metadata service.
    `anonymous` is `data.store.anonymous`: if False, s3, gs and az are always signed, if necessary with later answers of
    that service.  Raises DataError: the selected profile does not exist, or credentials cannot be read.
    """
    scheme = address.partition("://")[0]
    web = scheme in ("http", "https", "hf")
    account = _azure_account() if scheme == "az" else {}
    if anonymous and not (web and "@" in authority(address)):
        return Signing("not signed, because data.store.anonymous=true", {} if web else account | _UNSIGNED)
    finders = {"s3": _aws, "gs": _google, "az": lambda: _azure(account), "hf": _hugging_face}
    found = finders.get(scheme, lambda: _web(address))()
    if isinstance(found, Signing):
        return found
    if anonymous is False and not web:
        return Signing(f"signed with the machine's credentials: {found}", account)
    return Signing(f"not signed: {found}", {} if web else account | _UNSIGNED)


def _aws() -> Signing | str:
    """Return the credentials, or a text on where none were found; likewise in the functions below."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return Signing("signed with AWS_ACCESS_KEY_ID", {})
    try:
        from botocore.exceptions import BotoCoreError  # takes a third of a second
    except ModuleNotFoundError:
        return _aws_without_boto3()

    try:
        return _by_boto3() or "no AWS_* in the environment, and boto3 finds no profile and no role"
    except (BotoCoreError, OSError, ValueError) as error:  # ValueError from a `credential_process`
        raise DataError(
            f"Cannot read the AWS credentials: {one_line(error)}; correct AWS_PROFILE, AWS_ROLE_ARN or the profile's "
            "files, export keys, or set data.store.anonymous=true"
        ) from None


def _aws_without_boto3() -> Signing | str:
    if name := _first_set("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return Signing(f"signed with {name}", {})
    named = (os.environ.get(f"AWS_{name}_FILE") or f"~/.aws/{file}" for name, file in _AWS_FILES)
    files = map(Path, filter(_is_readable, map(os.path.expanduser, named)))
    with_keys = (str(file) for file in files if _AWS_KEYS.search(file.read_text(errors="replace")))
    if profile := _first_set("AWS_PROFILE", "AWS_DEFAULT_PROFILE") or next(with_keys, None):
        with needs_extra(f"Signing with the AWS profile {profile} (or set data.store.anonymous=true)", "boto3"):
            pass
    if name := _first_set(*_AWS_CONTAINER):
        return Signing(f"signed with {name}", {})
    header = "X-aws-ec2-metadata-token"
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        token = _answers(_METADATA_HOST, "/latest/api/token", f"{header}-ttl-seconds", "60", "PUT")
        if token and _answers(_METADATA_HOST, "/latest/meta-data/iam/security-credentials/", header, token):
            return Signing("signed with the machine's role", {})
    return "no AWS_* in the environment, no profile, no role of the machine"


@functools.cache
def _by_boto3() -> Signing | None:
    """boto3's credentials; cached, because boto3 waits for the metadata service of a machine that has none."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    if (session := boto3.Session()).get_credentials() is None:
        return None
    found = Boto3CredentialProvider(session, ttl=_REREAD)
    kind, region = found.credentials.method, found.config.get("region")
    in_file = kind in ("shared-credentials-file", "config-file")  # which a boto3 session reads only once
    provider = (lambda: Boto3CredentialProvider(ttl=_REREAD)()) if in_file else found
    settings = {"region": region} if region and not os.environ.get("AWS_REGION") else {}
    endpoint = session.client("s3", region_name=region or "us-east-1").meta.endpoint_url  # a profile may set its own
    if not re.search(r"\.amazonaws\.com(\.cn)?$", endpoint):
        settings["endpoint"] = endpoint
    return Signing(f"signed with boto3's {kind}", {"credential_provider": provider} | settings)


def _google() -> Signing | str:
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if name := _first_set(*names, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"):
        return Signing(f"signed with {name}", {})
    login = Path(os.path.expanduser(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"))
    login /= "application_default_credentials.json"
    if _is_readable(login):
        return Signing(f"signed with {login}", {"application_credentials": str(login)})
    host, path = os.environ.get("GCE_METADATA_HOST") or _METADATA_HOST, "/computeMetadata/v1/instance/service-accounts"
    if os.environ.get("NO_GCE_CHECK", "").lower() != "true" and _answers(
        host, f"{path}/default/email", "Metadata-Flavor", "Google"
    ):
        return Signing("signed with the machine's service account", {})
    return f"no GOOGLE_* in the environment, no {login}, no service account of the machine"


def _azure_account() -> dict[str, Any]:
    """Options under names of the `az` command and the portal that obstore does not read."""
    parts = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    given = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in parts)}
    endpoint = given.get("BlobEndpoint", "").rstrip("/")
    name = given.get("AccountName") or (urlsplit(endpoint).hostname or "").partition(".")[0]
    if name and not endpoint and (suffix := given.get("EndpointSuffix")):
        endpoint = f"{given.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}"
    options = {
        "account_name": name or os.environ.get("AZURE_STORAGE_ACCOUNT"),
        "account_key": given.get("AccountKey") or os.environ.get("AZURE_STORAGE_KEY"),
        "sas_key": given.get("SharedAccessSignature"),
        "endpoint": endpoint,
    }
    return {name: value for name, value in options.items() if value}


def _azure(account: dict[str, Any]) -> Signing | str:
    hide(*(account.get(name, "") for name in ("account_key", "sas_key")))
    if name := _first_set(
        *(["AZURE_STORAGE_CONNECTION_STRING"] if account.keys() & {"account_key", "sas_key"} else []),
        *(f"AZURE_STORAGE_{name}" for name in ("TOKEN", "ACCOUNT_KEY", "ACCESS_KEY", "MASTER_KEY", "KEY")),
        *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"),
        *("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY", "AZURE_USE_AZURE_CLI"),
        *("AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT"),
    ):
        return Signing(f"signed with {name}", account)
    login = Path(os.path.expanduser(os.environ.get("AZURE_CONFIG_DIR") or "~/.azure")) / "azureProfile.json"
    if shutil.which("az") and _is_readable(login) and b'"user"' in login.read_bytes():
        return Signing(f"signed with the `az` login in {login.parent}", account | {"use_azure_cli": True})
    identity = "/metadata/identity/oauth2/token"
    query = "api-version=2019-08-01&resource=https%3A%2F%2Fstorage.azure.com"
    if client := os.environ.get("AZURE_CLIENT_ID"):
        query += f"&client_id={client}"
    if _answers(_METADATA_HOST, f"{identity}?{query}", "Metadata", "true"):
        endpoint = f"http://{_METADATA_HOST}{identity}"
        return Signing("signed with the machine's managed identity", account | {"msi_endpoint": endpoint})
    return f"no key, token or identity in AZURE_*, no `az` login in {login.parent}, no identity of the machine"


def _is_readable(path: str | Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK)  # not so in the home of another user


def _hugging_face() -> Signing | str:
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    file = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or f"{home}/token"))
    if token := os.environ.get("HF_TOKEN", "").strip():
        return _with_headers("HF_TOKEN", {"Authorization": f"Bearer {token}"})
    if _is_readable(file) and (token := file.read_text().strip()):
        return _with_headers(str(file), {"Authorization": f"Bearer {token}"})
    return f"no HF_TOKEN in the environment, no {file}"


def _web(address: str) -> Signing | str:
    user, _, target = authority(address).rpartition("@")
    host = re.sub(r":\d*$", "", target.lower())
    file = Path(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc"))
    headers = {name: value for where, name, value in _header_lines() if where in (host, target.lower())}
    if user:
        return _with_headers("the user in the address", headers | _basic(unquote(user)))
    if "Authorization" not in headers and (login := _netrc_login(file, host)):
        return _with_headers(str(file), headers | _basic(login))
    if headers:
        return _with_headers(_HEADERS, headers)
    return f"no user in the address, no line for {host} in {_HEADERS}, no entry in {file}"


def authority(address: str) -> str:
    """USER:PASSWORD@HOST:PORT of a web address."""
    return address.partition("://")[2].partition("?")[0].partition("/")[0]


def _header_lines() -> Iterator[tuple[str, str, str]]:
    """HOST[:PORT], name and value of each line of the variable."""
    for number, line in enumerate(os.environ.get(_HEADERS, "").splitlines(), 1):
        match = re.fullmatch(r"\s*(\S+)\s+(authorization|cookie):\s*(\S.*?)\s*", line, re.IGNORECASE)
        if match:
            yield match[1].lower(), match[2].title(), match[3]
        elif line.strip():
            raise DataError(
                f"Cannot read line {number} of {_HEADERS}: it is not `HOST Authorization: VALUE` or `HOST Cookie: "
                "VALUE`; correct it (other headers are not supported, because a redirect would leak them)"
            )


def _netrc_login(file: Path, host: str) -> str | None:
    """USER:PASSWORD of a host's own netrc entry; the default entry is ignored."""
    try:
        login, _, password = netrc.netrc(file).hosts[host]
        return f"{login}:{password}"
    except (FileNotFoundError, KeyError):
        return None
    except (OSError, UnicodeError, netrc.NetrcParseError) as error:  # its message may contain the password
        at = f", line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else ""
        warn_once("Cannot read %s%s; no password in it is sent; correct it, or set NETRC to another file", file, at)
        return None


def _basic(login: str) -> dict[str, str]:
    hide(login.partition(":")[2])
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _with_headers(found: str, headers: dict[str, str]) -> Signing:
    for value in headers.values():
        hide(value, value.rpartition(" ")[2])
    return Signing(f"signed with {found}", {}, headers)


@functools.cache
def _answers(host: str, path: str, header: str, value: str, method: str = "GET") -> str:
    """Return the answer of the machine's metadata service (link-local, no proxies) at a path; '' if it has none."""
    connection = http.client.HTTPConnection(host, timeout=_PROBE_S)
    try:
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        connection.request(method, path, headers={header: value})
        answer = connection.getresponse()
        return answer.read(4096).decode() if answer.status == 200 else ""
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _first_set(*names: str) -> str | None:
    return next((name for name in names if os.environ.get(name)), None)
