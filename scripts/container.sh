#!/usr/bin/env bash
# container.sh: makes an image that runs the program (see Dockerfile): Open MPI, and ssh between the pods of an MPIJob.
# The MPI operator mounts a key of its own for each job, with permissions that sshd would refuse.
set -euo pipefail

apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
    openmpi-bin libgomp1 openssl openssh-client openssh-server ca-certificates >/dev/null
rm -rf /var/lib/apt/lists/*
mkdir -p /run/sshd
echo 'StrictModes no' >/etc/ssh/sshd_config.d/mpi.conf
printf 'Host *\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n' \
    >/etc/ssh/ssh_config.d/mpi.conf
