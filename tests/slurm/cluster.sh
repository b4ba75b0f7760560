#!/usr/bin/env bash
# A SLURM of one node on this machine, without systemd, for the tests: cluster.sh up|down FOLDER
# Needs root and the packages slurm-wlm and munge. All state is in FOLDER; `down` ends only what `up` started.
set -euo pipefail
action=$1 base=$2
node=$(hostname -s)

configure() {
  mkdir -p "$base"/{state,spool,log,run}
  chmod 755 "$base" "$base/run"
  cat >"$base/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$base/run/munge.socket
CredType=cred/munge
SlurmctldPort=16917
SlurmdPort=16918
SlurmctldPidFile=$base/run/slurmctld.pid
SlurmdPidFile=$base/run/slurmd.pid
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool
SlurmctldLogFile=$base/log/slurmctld.log
SlurmdLogFile=$base/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobRequeue=1
ReturnToService=2
KillWait=5
MessageTimeout=60
SlurmctldTimeout=120
SlurmdTimeout=120
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(getconf _NPROCESSORS_ONLN) RealMemory=$(awk '/MemTotal/ {print int($2 / 1200)}' /proc/meminfo) State=UNKNOWN
PartitionName=main Nodes=$node Default=YES MaxTime=INFINITE State=UP
CONF
}

start() { # name, command...: in the background, its id kept
  local name=$1
  shift
  "$@" >"$base/log/$name.out" 2>&1 &
  echo $! >"$base/run/$name.started"
}

up() {
  configure
  export SLURM_CONF=$base/slurm.conf
  (umask 077 && head -c 1024 /dev/urandom >"$base/run/munge.key")
  start munged munged --foreground --key-file="$base/run/munge.key" --socket="$base/run/munge.socket" \
    --pid-file="$base/run/munged.pid" --log-file="$base/log/munged.log" --seed-file="$base/run/munge.seed"
  for _ in $(seq 50); do [ -S "$base/run/munge.socket" ] && break; sleep 0.1; done
  start slurmctld slurmctld -D -f "$SLURM_CONF"
  start slurmd slurmd -D -f "$SLURM_CONF"
  for _ in $(seq 150); do
    [ "$(sinfo --noheader --format=%T 2>/dev/null || true)" = idle ] && return
    sleep 0.2
  done
  echo "the node did not become idle; see $base/log" >&2
  return 1
}

down() {
  export SLURM_CONF=$base/slurm.conf
  jobs=$(timeout 30 squeue --noheader --format=%A || true)
  [ -z "$jobs" ] || timeout 30 scancel --full $jobs || true
  for _ in $(seq 50); do [ -z "$(timeout 30 squeue --noheader || true)" ] && break; sleep 0.2; done
  for name in slurmd slurmctld munged; do
    id=$(cat "$base/run/$name.started" 2>/dev/null || true)
    [ -n "$id" ] && kill "$id" 2>/dev/null || continue
    for _ in $(seq 100); do kill -0 "$id" 2>/dev/null || break; sleep 0.1; done
    rm -f "$base/run/$name.started"
  done
}

"$action"
