# g++, with what it made of equal input before: tests/support/compiled.py says what this is for, and
# writes the lines above, which set real, store, salt and installed. What is not a command of
# Inductor's, word for word as this knows them, goes to the compiler as it is.

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
[ -w "$store" ] || compiler "$@" # another user, or it was removed
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
# Two that want the same wait for one; for one that was stopped or is killed, not for long.
command -v flock >/dev/null && exec 9>"$store/lock.${key%"${key#??}"}" && flock -w 60 9 && [ -f "$kept" ] && take 2>/dev/null
"$real" "$@" 9>&- || exit
# What names the directory elsewhere than to a debugger is of use here only.
case $out in
  *.gch | *.i) named=$out ;;
  *) named=$temporary; strip -g -o "$named" "$out" 2>/dev/null || exit 0 ;;
esac
case $out in *.gch) ;; *) grep -qF "${source%/*}/" "$named" && kept='' ;; esac
[ "$named" = "$out" ] || rm -f "$named"
[ -n "$kept" ] || exit 0
# Only a whole copy is kept.
{
  case $out in *.gch) ln "$out" "$kept.$$" ;; *) false ;; esac || cp "$out" "$kept.$$"
} 2>/dev/null && mv "$kept.$$" "$kept" || rm -f "$kept.$$"
exit 0
