#!/bin/bash
# Process 1 of one host, in fresh network, pid, mount, uts and ipc namespaces: its own root, then its sshd.
#   host_init.sh NAME SCRATCH KEYS VENV
# Its root is an overlay of this machine's, whose upper half is SCRATCH: it reads what is installed here, and writes there. A host that
# is booted again finds its files.
set -euo pipefail
name=$1 scratch=$2 keys=$3 venv=$4

mount --make-rprivate /
mkdir -p "$scratch"/{up,work,venv_up,venv_work,root}
root=$scratch/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/up,workdir=$scratch/work" "$root"
mkdir -p "$root$venv" # where the environment is on another file system than /, an overlay of / does not show it
mount -t overlay overlay -o "lowerdir=$venv,upperdir=$scratch/venv_up,workdir=$scratch/venv_work" "$root$venv"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=300m,mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/tmp" # Ray looks in there for clusters of this machine
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root/run"
mkdir "$root/run/sshd"

home=$root/root
rm -rf "$home/.ssh" "$home/.ray" "$home/.bashrc" "$home/.bash_profile" "$home/.profile" # this machine's
mkdir -m 700 "$home/.ssh"
touch "$home/.bashrc"
install -m 600 "$keys/id.pub" "$home/.ssh/authorized_keys"
[ "$name" != admin ] || install -m 600 "$keys/id" "$home/.ssh/id_ed25519"
install -m 644 "$keys/hosts" "$root/etc/hosts"
# These interfaces lead to no name server: each look-up, of gloo or of sshd, would wait for seconds.
sed -i 's/^hosts:.*/hosts: files/' "$root/etc/nsswitch.conf"
install -m 600 "$keys/host_key" "$root/etc/ssh/ssh_host_ed25519_key"
cat >"$root/etc/ssh/sshd_config" <<END
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
MaxStartups 100
MaxSessions 100
END

hostname "$name"
cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
cd /
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root /usr/sbin/sshd -D -e &
# Process 1 reaps what others leave.
while true; do wait -n || true; done
