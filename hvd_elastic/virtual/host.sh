#!/bin/sh
# The first process (PID 1) of a virtual host, in namespaces of its own; see netns.py.
#
# It prints "made" when the namespaces exist, reads one line when the cable (eth0) is connected,
# sets up the host, prints "ready" and becomes the host's service manager: it reaps orphans and
# restarts sshd. When it dies, the kernel ends all processes on the host.
#
# Environment: VC_HOST name; VC_FOLDER the host's folder; VC_CLUSTER the cluster's folder;
# VC_ADDRESS; VC_TBF arguments of the tc rate limit, or empty; VC_CGROUP folder, or empty;
# VC_SHARES paths shared with the machine, one per line; VC_SSHD, VC_IP, VC_TC programs.
set -eu
umask 022

echo made
# At end of file the process that builds the cluster is dead.
read -r go || exit 1

# "0" means the process that writes it.
[ -z "$VC_CGROUP" ] || echo 0 > "$VC_CGROUP/cgroup.procs"

"$VC_IP" -batch - <<END
link set lo up
address add $VC_ADDRESS/24 brd + dev eth0
link set eth0 addrgenmode none
link set eth0 up
END
# shellcheck disable=SC2086  # words
[ -z "$VC_TBF" ] || "$VC_TC" qdisc add dev eth0 root $VC_TBF

# The host has its own root folder. Most of its entries are the machine's, bind-mounted. Because it
# is separate, mount points that the machine lacks (/data, /run/sshd) can be created in it.
new=$VC_FOLDER/root
mount -n -t tmpfs -o mode=755,size=16m virtclust "$new"
# Unbindable, or a bind mount of the file system that holds "$new" would contain "$new" again.
mount -n --make-unbindable "$new"

# mirror FROM TO SKIP: bind-mount each entry of folder FROM in TO, except the names in SKIP.
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

# The host has its own /etc with symbolic links to the machine's entries. Bind mounts on the machine's
# files would not last: when the machine renames another file over such a file, the kernel removes
# the mount in every namespace.
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
# Without PAM, sshd refuses an account whose password is locked with '!'.
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
# Logins with a terminal are recorded in the host's own log files.
for book in wtmp btmp lastlog; do
    if [ -f "/var/log/$book" ]; then
        : > "/run/virtclust.$book"
        mount -n --bind "/run/virtclust.$book" "/var/log/$book"
    fi
done

# What would shut this machine down ends the host instead. The programs may be links to systemctl,
# which is then hidden as well, except for its other commands.
cat > /run/virtclust.power <<'END'
#!/bin/sh
# shutdown [-h|-P] [now|+MINUTES], shutdown -c, poweroff, halt, systemctl poweroff|halt
verb=${0##*/}
if [ "$verb" = systemctl ]; then
    case ${1-} in poweroff | halt | reboot) verb=$1 ;; *) exec /run/virtclust.systemctl "$@" ;; esac
fi
minutes=0
[ "$verb" != shutdown ] || minutes=1
for word in "$@"; do
    case $word in
    now) minutes=0 ;;
    +*) minutes=${word#+} ;;
    -c) [ ! -f /run/virtclust.shutdown ] || kill "$(cat /run/virtclust.shutdown)"; exit ;;
    -r | --reboot) verb=reboot ;;
    esac
done
if [ "$verb" = reboot ]; then
    echo "a virtual host does not reboot; on its machine: virtclust crash HOST; virtclust boot HOST" >&2
    exit 1
fi
setsid sh -c 'echo $$ > /run/virtclust.shutdown; sleep "$1"; kill -TERM 1' - "$((minutes * 60))" \
    < /dev/null > /dev/null 2>&1 &
END
chmod 755 /run/virtclust.power
for program in systemctl shutdown poweroff halt reboot; do
    for path in "/usr/sbin/$program" "/sbin/$program" "/usr/bin/$program" "/bin/$program"; do
        [ -e "$path" ] || continue
        if [ "$program" = systemctl ] && [ ! -e /run/virtclust.systemctl ]; then
            : > /run/virtclust.systemctl
            mount -n --bind "$path" /run/virtclust.systemctl
        fi
        cmp -s /run/virtclust.power "$path" || mount -n --bind /run/virtclust.power "$path"
    done
done
[ ! -e /proc/sysrq-trigger ] || mount -n --bind /dev/null /proc/sysrq-trigger

echo ready
trap 'exit 0' TERM # of a program that shuts the host down
exec < /dev/null > /run/virtclust/host.log 2>&1
while :; do
    "$VC_SSHD" -D -f /run/virtclust/sshd_config -E /run/virtclust/sshd.log &
    wait $! || :
    sleep 1
done
