# The image of a trainer; docs/docker.md says how to build and to run it.
FROM python:3.12-slim-bookworm

# torch.compile builds C code when a run starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Any user id may run it (docker run --user); torch needs a name and a home for its caches.
RUN useradd --uid 1000 --create-home vesuvius \
    && mkdir /data \
    && chmod 1777 /home/vesuvius /data
ENV HOME=/home/vesuvius \
    LOGNAME=vesuvius

# pip reads these; the builder chooses the package index for torch.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

# The dependencies are a separate layer: a change of the sources does not download them again.
WORKDIR /opt/vesuvius
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["train"], sep="\n")' \
        > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps .

USER vesuvius
WORKDIR /data
ENTRYPOINT ["vesuvius"]
CMD ["--help"]
