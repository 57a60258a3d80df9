# A g++ that reuses its output for equal input. tests/support/compiled.py explains why, and writes
# the lines above, which set real, store, salt, installed and base. Commands that are not exactly
# those of Inductor go to the compiler unchanged.

compiler() { exec "$real" "$@"; }

[ "${S3CACHE_TEST_COMPILED-}" = off ] && compiler "$@"
case $PWD in *_CxxBuild) ;; *) compiler "$@" ;; esac
[ -z "${CPATH-}${CPLUS_INCLUDE_PATH-}${LIBRARY_PATH-}${COMPILER_PATH-}${GCC_EXEC_PREFIX-}" ] || compiler "$@"

out='' source='' header='' before='' words="$salt"
for word in "$@"; do
  case $before in
    -o) out=$word word=OUT ;;
    -include) header=$word word=${word##*/} ;;
    -x) [ "$word" = c++-header ] || compiler "$@" ;;
    -D) ;;
    *)
      case $word in
        -o | -include | -x | -D | -c | -E | -P | -shared | -pedantic | -g[0-9]) ;;
        -I* | -L*)
          case ${word#-?} in "$installed"/* | "$base"/*) ;; *) compiler "$@" ;; esac ;;
        -[fmWl]*[/,@]*) compiler "$@" ;;
        -[fmWlDO]* | -std=*) ;;
        /*.cpp | /*.hpp | /*.h)
          [ -z "$source" ] || compiler "$@"
          source=$word word=${word##*.} ;;
        *) compiler "$@" ;;
      esac ;;
  esac
  case $before in -o | -include | -x | -D) before='' ;; *) before=$word ;; esac
  words="$words
$word"
done
case $out in /*) ;; *) compiler "$@" ;; esac
[ -w "$store" ] || compiler "$@" # it has another owner, or was removed
[ -f "$source" ] && [ ! -e "$out" ] || compiler "$@"
grep -q '^ *# *include *["<]/' "$source" ${header:+"$header"} && compiler "$@"

key=$({ printf "%s\n" "$words"; cat "$source" ${header:+"$header"}; } | sha256sum) || compiler "$@"
kept=$store/${key%% *}
temporary=$out.$$

take() { # precompiled headers are large, and nothing writes into them
  case $out in *.gch) ln "$kept" "$temporary" 2>/dev/null || cp "$kept" "$temporary" ;;
  *) cp "$kept" "$temporary" ;; esac && mv "$temporary" "$out" && touch -c "$kept" && exit 0
}

[ -f "$kept" ] && take 2>/dev/null
# Processes that need the same output wait for the first one, but not long: it may be stopped.
command -v flock >/dev/null && exec 9>"$store/lock.${key%"${key#??}"}" && flock -w 60 9 && [ -f "$kept" ] && take 2>/dev/null
"$real" "$@" 9>&- || exit
# Output with the path of this directory, other than for debuggers, is useful only here.
case $out in
  *.gch | *.i) named=$out ;;
  *) named=$temporary; strip -g -o "$named" "$out" 2>/dev/null || exit 0 ;;
esac
case $out in *.gch) ;; *) grep -qF "${source%/*}/" "$named" && kept='' ;; esac
[ "$named" = "$out" ] || rm -f "$named"
[ -n "$kept" ] || exit 0
# Keep only complete copies.
{
  case $out in *.gch) ln "$out" "$kept.$$" ;; *) false ;; esac || cp "$out" "$kept.$$"
} 2>/dev/null && mv "$kept.$$" "$kept" || rm -f "$kept.$$"
exit 0
