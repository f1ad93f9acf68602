#!/bin/bash
# The first process of a virtual machine that machine.py starts: prepares it, runs the job, ends the machine.
# The host's files are its root, read-only; the job's folder is mounted writable.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /run/job /run/disk /run/tmp
mount -t tmpfs tmpfs /dev/shm
job=$(sed -n 's/.*faultjob=\([^ ]*\).*/\1/p' /proc/cmdline)
mount -t hostfs none /run/job -o "$job"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/run/tmp HOME=/run
hostname virtual
ip link set lo up 2>/dev/null
modprobe -d /run/job/modules dm-flakey
cd /run/tmp
bash /run/job/job.sh >/run/job/out 2>/run/job/err </dev/null
echo $? >/run/job/status
sync -f /run/job
echo o >/proc/sysrq-trigger
sleep 10
