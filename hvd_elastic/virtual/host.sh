#!/bin/sh
# The first process (PID 1) of a virtual host, in namespaces of its own; see netns.py.
#
# It says "made" when the namespaces exist, reads one line when the cable (eth0) is plugged in,
# arranges the host, says "ready" and becomes the host's service manager: it reaps orphans and
# keeps sshd running. When it dies, the kernel ends everything on the host.
#
# Environment: VC_HOST name; VC_FOLDER the host's folder; VC_CLUSTER the cluster's folder;
# VC_ADDRESS; VC_TBF words of the tc rate limit, or empty; VC_CGROUP folder, or empty;
# VC_SHARES paths that stay visible, one a line; VC_SSHD, VC_IP, VC_TC programs.
set -eu
umask 022

echo made
# End of file instead of a line: whoever builds the cluster is dead.
read -r go || exit 1

# "0" stands for the writer itself.
[ -z "$VC_CGROUP" ] || echo 0 > "$VC_CGROUP/cgroup.procs"

"$VC_IP" -batch - <<END
link set lo up
address add $VC_ADDRESS/24 brd + dev eth0
link set eth0 addrgenmode none
link set eth0 up
END
# shellcheck disable=SC2086  # words
[ -z "$VC_TBF" ] || "$VC_TC" qdisc add dev eth0 root $VC_TBF

# A root folder of the host's own, in which everything is the machine's but what a host must have
# to itself. An own root, because a mount point that the machine lacks (/data, /run/sshd) can then
# be made without touching the machine.
new=$VC_FOLDER/root
mount -n -t tmpfs -o mode=755,size=16m virtclust "$new"
# Unbindable: else the copy of the file system that holds "$new" would contain "$new" again.
mount -n --make-unbindable "$new"

# mirror FROM TO SKIP: bind each entry of a folder.
mirror() {
    for entry in "$1"/* "$1"/.[!.]*; do
        name=${entry##*/}
        case " $3 " in *" $name "*) continue ;; esac
        if [ -L "$entry" ]; then
            cp -P "$entry" "$2/$name"
        elif [ -d "$entry" ]; then
            mkdir "$2/$name"
            mount -n --rbind "$entry" "$2/$name"
        elif [ -f "$entry" ]; then
            : > "$2/$name"
            mount -n --bind "$entry" "$2/$name"
        fi
    done
}
mirror "" "$new" "proc sys run tmp data etc"

# The host's /etc is a folder of its own that links to the entries of the machine's. Mounting over
# the machine's files would not last: the kernel takes such a mount away in every namespace when the
# machine renames another file over the one below it.
etc=/.etc.$VC_HOST
mkdir "$new$etc" "$new/etc"
mount -n --rbind /etc "$new$etc"
set --
for entry in /etc/* /etc/.[!.]*; do
    case ${entry##*/} in hosts | shadow) continue ;; esac
    if [ -e "$entry" ] || [ -L "$entry" ]; then
        set -- "$@" "$etc/${entry##*/}"
    fi
done
[ $# = 0 ] || ln -s "$@" "$new/etc"
: > "$new/etc/hosts"
mount -n --bind "$VC_CLUSTER/etc_hosts" "$new/etc/hosts"
# Without PAM, sshd turns away an account whose password is locked with '!'.
if [ -e /etc/shadow ]; then
    (umask 077 && sed 's/^root:![^:]*:/root:*:/' /etc/shadow > "$new/etc/shadow")
fi

mkdir "$new/proc" "$new/sys" "$new/run" "$new/tmp" "$new/data"
mount -n -t proc proc "$new/proc"
# A new sysfs shows the host's network instead of the machine's.
if mount -n -t sysfs sysfs "$new/sys" 2>/dev/null; then
    [ ! -d "$new/sys/fs/cgroup" ] || mount -n --rbind /sys/fs/cgroup "$new/sys/fs/cgroup"
else
    mount -n --rbind /sys "$new/sys"
fi
mount -n -t tmpfs -o mode=755 run "$new/run"
mirror /run "$new/run" "sshd utmp lock netns virtclust virtclust.old"
mkdir -m 1777 "$new/run/lock"
mkdir "$new/run/sshd" "$new/run/virtclust" "$new/run/virtclust.old"
mount -n --bind "$VC_FOLDER" "$new/run/virtclust"
mount -n --bind "$VC_FOLDER/tmp" "$new/tmp"
mount -n --bind "$VC_FOLDER/data" "$new/data"
printf '%s\n' "$VC_SHARES" | while IFS= read -r share; do
    if [ -d "$share" ]; then
        mkdir -p "$new$share"
        mount -n --rbind "$share" "$new$share"
    elif [ -f "$share" ]; then
        mkdir -p "$new${share%/*}"
        : > "$new$share"
        mount -n --bind "$share" "$new$share"
    fi
done

cd "$new"
pivot_root . run/virtclust.old
cd /
umount -l /run/virtclust.old
rmdir /run/virtclust.old
mount -n --make-private /

echo "$VC_HOST" > /proc/sys/kernel/hostname
[ ! -d /dev/shm ] || mount -n -t tmpfs -o mode=1777 shm /dev/shm
# Logins with a terminal are noted in the host's own books.
for book in wtmp btmp lastlog; do
    if [ -f "/var/log/$book" ]; then
        : > "/run/virtclust.$book"
        mount -n --bind "/run/virtclust.$book" "/var/log/$book"
    fi
done

echo ready
exec < /dev/null > /run/virtclust/host.log 2>&1
while :; do
    "$VC_SSHD" -D -f /run/virtclust/sshd_config -E /run/virtclust/sshd.log &
    wait $! || :
    sleep 1
done
